"""Norm and gate of attention's output."""
