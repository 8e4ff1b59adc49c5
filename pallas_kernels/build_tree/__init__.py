"""The tree of the likeliest paths through a lattice."""

from pallas_kernels.build_tree.kernel import build_tree as build_tree
from pallas_kernels.build_tree.reference import build_tree as build_tree_reference  # noqa: F401
