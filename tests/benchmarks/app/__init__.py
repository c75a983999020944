"""The app whose job our workers run in the benchmark."""
