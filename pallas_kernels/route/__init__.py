"""Choice of experts."""

from pallas_kernels.route.kernel import Route as Route
from pallas_kernels.route.kernel import route as route
from pallas_kernels.route.reference import route as route_reference  # noqa: F401
