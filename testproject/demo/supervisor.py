"""Workers and schedulers that are started again when they die, as systemd does with `Restart=always`."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from django_forgejobs.models import Job
from testproject.demo.narrator import Narrator
from testproject.demo.processes import Child, Children, DemoError


@dataclass
class Post:
    """A place that is always filled: by a worker, or by a scheduler."""

    name: str
    arguments: tuple[str, ...]
    child: Child


class Supervisor:
    """Fills the posts and remembers the pids of the processes that were killed."""

    def __init__(self, children: Children, narrator: Narrator) -> None:
        self.children, self.narrator = children, narrator
        self.posts: dict[str, Post] = {}
        self.killed: list[int] = []

    def fill(self, name: str, *arguments: str) -> None:
        """Start `manage.py ARGUMENTS` and keep one running."""
        child = self.children.manage(*arguments, name=name)
        self.posts[name] = Post(name, arguments, child)

    def tend(self) -> None:
        """Start again whoever was killed; a worker that ends by itself is an error."""
        for post in self.posts.values():
            code = post.child.ended
            if code is None:
                continue
            if code != -signal.SIGKILL:
                text = f"`manage.py {post.child.command}` ended with code {code}."
                raise DemoError(f"{text} The end of its log:\n{_tail(post.child)}")
            pid = post.child.pid
            held = " and ".join(f"{job.type} (job {job.pk})" for job in held_by(pid))
            self._replace(post)
            self.narrator.say(
                f"Process {post.name}, pid {pid}, was killed{f' while it ran {held}' if held else ''}:"
                f" started again, pid {post.child.pid}."
            )

    def kill(self, name: str) -> int:
        """Kill a process, whatever it is at, and replace it; return its pid."""
        post = self.posts[name]
        pid = post.child.pid
        post.child.signal(signal.SIGKILL)
        post.child.popen.wait()
        self._replace(post)
        return pid

    def kill_if_busy(self, name: str) -> list[Job]:
        """Kill a worker if it runs jobs just now, and replace it; return those jobs.

        It is frozen while we look, and the server gets a moment to end the statement that it is at, so
        that the answer is still true when the kill arrives.
        """
        post = self.posts[name]
        post.child.signal(signal.SIGSTOP)
        time.sleep(0.1)
        held = held_by(post.child.pid)
        post.child.signal(signal.SIGKILL if held else signal.SIGCONT)
        if held:
            post.child.popen.wait()
            self._replace(post)
        return held

    def _replace(self, post: Post) -> None:
        self.killed.append(post.child.pid)
        post.child = self.children.manage(*post.arguments, name=post.name)


def held_by(pid: int) -> list[Job]:
    """Return the running jobs of a worker on this machine."""
    running = Job.objects.filter(status="running", locked_by__contains=f":{pid}:")
    return list(running.order_by("pk"))


def _tail(child: Child, characters: int = 2000) -> str:
    return child.log.read_text(errors="replace")[-characters:]
