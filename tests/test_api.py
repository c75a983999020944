"""The names of the package: what `from django_forgejobs import …` gives, whatever was imported before."""

import importlib
import pkgutil

import django_forgejobs


def test_no_module_of_the_package_takes_the_place_of_a_function() -> None:
    """Importing `django_forgejobs.x` binds `x` in the package: a module called `heartbeat` did."""
    for module in pkgutil.walk_packages(django_forgejobs.__path__, "django_forgejobs."):
        if ".migrations." not in module.name:
            importlib.import_module(module.name)
    for name in django_forgejobs.__all__:
        assert callable(getattr(django_forgejobs, name)), name
