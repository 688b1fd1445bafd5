"""Measurements that back what this project says: each module prints a table, and `--write` keeps it beside itself."""
