"""Machine: the instructions that this CPU can really run.

Knows processors and environment variables. Knows nothing of torch until it is asked to try a product.
"""

from pipepart.machine.answers import cache_folder
from pipepart.machine.cores import usable_cores
from pipepart.machine.limits import Products, check_products, limit_instructions, products, usable

__all__ = ["Products", "cache_folder", "check_products", "limit_instructions", "products", "usable", "usable_cores"]
