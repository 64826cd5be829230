"""What ops cost: measured, computed or read from a file."""

from pipepart.cost.cache import cache_folder, profiled
from pipepart.cost.costs import OpCosts
from pipepart.cost.profile import profile, state_kept, whole_step

__all__ = ["OpCosts", "cache_folder", "profile", "profiled", "state_kept", "whole_step"]
