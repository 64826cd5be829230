"""Machine: the cores and the instructions that this process can use, and the cache folder.

Knows processors and environment variables. Does not know models, and imports torch only to try a product.
"""

from pipepart.machine.host import cache_folder, usable_cores
from pipepart.machine.limits import Products, check_products, limit_instructions, products, usable

__all__ = ["Products", "cache_folder", "check_products", "limit_instructions", "products", "usable", "usable_cores"]
