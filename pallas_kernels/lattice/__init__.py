"""Scores of every candidate after every candidate of the position before."""
