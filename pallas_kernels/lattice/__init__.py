"""Scores of every candidate after every candidate of the position before."""

from pallas_kernels.lattice.kernel import Lattice as Lattice
from pallas_kernels.lattice.kernel import lattice as lattice
from pallas_kernels.lattice.reference import lattice as lattice_reference  # noqa: F401
