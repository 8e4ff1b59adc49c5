"""The tree of the likeliest paths through a lattice."""
