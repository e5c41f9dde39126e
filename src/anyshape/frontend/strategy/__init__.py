"""Strategy search for users: a model is traced, not run, and the strategy that was found can be printed and changed."""
from anyshape.frontend.strategy.api import StrategySearch, strategy

__all__ = ["StrategySearch", "strategy"]
