"""Measurements of speed and memory: every figure a ratio of two sides measured in the same run."""
