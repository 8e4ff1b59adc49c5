"""A branch's post-norm, its residual gate and the next norm."""
