"""Scores of every candidate after every candidate of the position before."""

from pallas_kernels.lattice.kernel import Lattice as Lattice
from pallas_kernels.lattice.kernel import lattice as lattice
from pallas_kernels.lattice.kernel import lattice_of_rows as lattice_of_rows
from pallas_kernels.lattice.reference import lattice as lattice_reference  # noqa: F401
from pallas_kernels.lattice.reference import lattice_of_rows as lattice_of_rows_reference  # noqa: F401
