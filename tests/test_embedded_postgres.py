"""The embedded PostgreSQL works, and nothing of it stays behind, however its owner ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from testproject import postgres, postgres_guard
from tests.waiting import wait_for

# psutil comes with the embedded PostgreSQL, psycopg with the extra `postgres`.
psutil = pytest.importorskip("psutil")
psycopg = pytest.importorskip("psycopg")

pytestmark = [
    # Not about the database under test: once, in the PostgreSQL run, is enough.
    pytest.mark.postgres_only,
    pytest.mark.skipif(not postgres.is_available(), reason="no embedded PostgreSQL here"),
]

CHECKOUT = Path(__file__).resolve().parent.parent
OWNER = """
import json, os, sys
from testproject.postgres import embedded_server
with embedded_server(directory=sys.argv[1]) as server:
    facts = {"url": server.url, "pid": server.pid, "guard": server.guard.pid}
    if "fork" in sys.argv and os.fork() == 0:  # the child waits for the end of stdin as well
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    print(json.dumps(facts), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a directory for servers, of which none may outlive the test.

    Not `tmp_path`: run by root, the directories above are opened for the server's user, and the
    next start of pytest closes its own again.
    """
    with tempfile.TemporaryDirectory(prefix="postgres-", dir=CHECKOUT / ".run") as directory:
        yield Path(directory)
        postgres_guard.sweep(directory)


@pytest.fixture
def owner(request: pytest.FixtureRequest, home: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a process that holds a server and says where on its stdout."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(home), getattr(request, "param", "")],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def facts_of(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    return {name: str(value) for name, value in json.loads(process.stdout.readline()).items()}


def answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            return connection.execute("SELECT 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False


def remains(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.is_dir())


def is_alive(pid: str) -> bool:
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(home: Path, facts: dict[str, str]) -> None:
    wait_for(lambda: not remains(home), message=lambda: f"left in {home}: {remains(home)}")
    wait_for(lambda: not is_alive(facts["pid"]), message="the server still runs")
    wait_for(lambda: not is_alive(facts["guard"]), message="the guard still runs")
    assert not answers(facts["url"])


@pytest.mark.parametrize("version", postgres.VERSIONS)
def test_a_server_of_each_version_answers_and_is_gone_after_its_block(version: int, home: Path) -> None:
    with postgres.embedded_server(version, home) as server:
        with psycopg.connect(server.url) as connection:
            assert connection.info.server_version // 10_000 == version
            assert connection.execute("SHOW max_connections").fetchone() == ("300",)
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            assert connection.execute("SHOW server_encoding").fetchone() == ("UTF8",)
        facts = {"url": server.url, "pid": str(server.pid), "guard": str(server.guard.pid)}
    assert remains(home) == []
    wait_until_gone(home, facts)


def test_settings_reach_the_server(home: Path) -> None:
    settings = {"fsync": "off", "application_name": "it's"}
    with (
        postgres.embedded_server(directory=home, settings=settings) as server,
        psycopg.connect(server.url) as connection,
    ):
        assert connection.execute("SHOW fsync").fetchone() == ("off",)
        assert connection.execute("SHOW application_name").fetchone() == ("it's",)


@pytest.mark.parametrize("how", ["fast", "immediate", "killed"])
def test_a_restarted_server_has_its_data_and_its_url(how: str, home: Path) -> None:
    with postgres.embedded_server(directory=home) as server:
        url, pid = server.url, server.pid
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
            server.start()
        else:
            server.restart(how)
        assert server.url == url
        assert server.pid != pid
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_a_stopped_server_refuses_connections_until_it_is_started(home: Path) -> None:
    with postgres.embedded_server(directory=home) as server:
        server.stop()
        assert not answers(server.url)
        server.start()
        assert answers(server.url)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(home: Path) -> None:
    with (
        pytest.raises(postgres_guard.EmbeddedPostgresError, match="max_connections"),
        postgres.embedded_server(directory=home, settings={"max_connections": "many"}),
    ):
        pass
    assert remains(home) == []


def test_a_path_too_long_for_a_socket_gets_a_short_one_for_a_while(home: Path) -> None:
    deep = home / ("long-" * 25)
    with postgres.embedded_server(directory=deep) as server:
        short = postgres_guard.short_socket_directory(server.directory)
        assert answers(server.url)
        assert (short / postgres_guard.SOCKET_NAME).exists()
    assert not short.exists()
    assert remains(deep) == []


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_server_vanishes_when_its_owner_is_killed(
    signal_number: signal.Signals, owner: subprocess.Popen[str], home: Path
) -> None:
    facts = facts_of(owner)
    assert answers(facts["url"])
    owner.send_signal(signal_number)
    owner.wait(30)
    wait_until_gone(home, facts)


@pytest.mark.parametrize("owner", ["fork"], indirect=True)
def test_a_forked_child_does_not_keep_the_server_alive(owner: subprocess.Popen[str], home: Path) -> None:
    facts = facts_of(owner)
    owner.kill()
    owner.wait(30)
    wait_until_gone(home, facts)


def test_the_guard_stops_the_server_when_it_is_terminated_itself(home: Path) -> None:
    with postgres.embedded_server(directory=home) as server:
        facts = {"url": server.url, "pid": str(server.pid), "guard": str(server.guard.pid)}
        server.guard.terminate()
        server.guard.wait(30)
        wait_until_gone(home, facts)
        with pytest.raises(postgres_guard.EmbeddedPostgresError, match="guard"):
            server.restart()


def test_what_a_killed_guard_left_is_swept_at_the_next_start(
    owner: subprocess.Popen[str], home: Path
) -> None:
    facts = facts_of(owner)
    os.kill(int(facts["guard"]), signal.SIGKILL)
    owner.kill()
    owner.wait(30)
    assert answers(facts["url"])  # nobody was left to stop it
    with postgres.embedded_server(directory=home) as server:
        assert remains(home) == [server.directory.name]
        assert answers(server.url)
        assert not is_alive(facts["pid"])
        assert not answers(facts["url"])


def test_a_sweep_leaves_servers_in_use_alone(home: Path) -> None:
    with postgres.embedded_server(directory=home) as server:
        postgres_guard.sweep(home)
        assert answers(server.url)


def test_an_owner_outlives_the_death_of_its_guard_and_cleans_up(home: Path) -> None:
    with postgres.embedded_server(directory=home) as server:
        facts = {"url": server.url, "pid": str(server.pid), "guard": str(server.guard.pid)}
        server.guard.kill()
        server.guard.wait(30)
    assert remains(home) == []
    wait_until_gone(home, facts)


class TestCommandLine:
    """`python -m testproject.postgres -- COMMAND`."""

    COMMAND = (sys.executable, "-m", "testproject.postgres", "--")
    SHOW = """
import os, signal, sys
import psycopg
url = os.environ["DATABASE_URL"]
psycopg.connect(url).close()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(url, flush=True)
signal.pause()
"""

    def test_the_command_gets_a_database_and_its_exit_code_comes_back(self) -> None:
        code = "import os, psycopg; psycopg.connect(os.environ['DATABASE_URL']).close(); exit(23)"
        run = subprocess.run([*self.COMMAND, sys.executable, "-c", code], cwd=CHECKOUT, timeout=60)
        assert run.returncode == 23

    def test_a_signal_reaches_the_command_and_the_server_ends_with_it(self) -> None:
        with subprocess.Popen(
            [*self.COMMAND, sys.executable, "-c", self.SHOW],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert answers(url)
            process.terminate()
            assert process.wait(30) == 7
        assert not answers(url)

    def test_a_command_that_a_signal_ended_gives_the_code_of_a_shell(self) -> None:
        code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        run = subprocess.run([*self.COMMAND, sys.executable, "-c", code], cwd=CHECKOUT, timeout=60)
        assert run.returncode == 128 + signal.SIGKILL
