"""The demo, `python -m testproject.demo [--once]`: real jobs, workers and kills, and a count."""
