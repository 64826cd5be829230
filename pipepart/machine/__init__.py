"""Whether 16-bit products work on this machine, and the instruction set with which they do.

Some virtual machines announce AMX and do not allow it: a bfloat16 product then ends the process with an illegal
instruction. On a CPU that announces AMX, the products are tried once in a child process and the answer is kept by
CPU and version of torch. Where they fail, the environment limits the instructions that torch's libraries choose.
They choose at the first product, so `import pipepart` is early enough unless products have run before it.
"""

from pipepart.machine.answers import cache_folder
from pipepart.machine.cores import usable_cores
from pipepart.machine.limits import Products, check_products, limit_instructions, products, usable

__all__ = ["Products", "cache_folder", "check_products", "limit_instructions", "products", "usable", "usable_cores"]
