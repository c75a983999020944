"""Settings for django-ox's worker: the test project's, without our app."""

import dj_database_url

from testproject.settings import *  # noqa: F403

INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_ox"]
MIDDLEWARE = []
ROOT_URLCONF = __name__
urlpatterns: list[object] = []
TASKS = {"default": {"BACKEND": "django_ox.backend.OxBackend"}}
DATABASES = {"default": dj_database_url.config(conn_max_age=None)}
