"""The tests, one folder per package. A package, so that no foreign `tests` in site-packages is taken for it."""
