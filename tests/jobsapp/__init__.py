"""A small app whose jobs real worker processes run: `FORGEJOBS_TEST_APPS=tests.jobsapp`."""
