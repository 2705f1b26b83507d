"""Benchmarks: `python -m bench.<name> [--json]`. Figures are ratios within one run; results live in bench/results/."""
