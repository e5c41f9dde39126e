"""The tiered store of branches' weights: a file that has all of them, and memory for some, under a limit in bytes."""
from anyshape.route.store.branch_cache import BranchCache, CacheCounts
from anyshape.route.store.branch_file import BranchFile
from anyshape.route.store.host_memory import BranchMemory
from anyshape.route.store.tiers import BranchBytes, LowerTier, UpperTier

__all__ = ["BranchBytes", "BranchCache", "BranchFile", "BranchMemory", "CacheCounts", "LowerTier", "UpperTier"]
