"""Post-expert norm and weighted sum of routed rows."""

from pallas_kernels.combine.kernel import Combine as Combine
from pallas_kernels.combine.kernel import combine as combine
from pallas_kernels.combine.kernel import row_squares as row_squares
from pallas_kernels.combine.reference import combine as combine_reference  # noqa: F401
from pallas_kernels.combine.reference import row_squares as row_squares_reference  # noqa: F401
