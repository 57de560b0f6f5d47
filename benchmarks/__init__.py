"""Measurements behind the README's figures: `python -m benchmarks.NAME [--json FILE]`.

Each prints one table. All contenders of a row are timed in turn within one process, so that what else the machine does
falls on all of them alike: read the ratios, not the microseconds.
"""
