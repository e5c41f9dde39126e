"""The profile of a dynamic network: what its routers decided, recorded, saved, merged and replayed."""
from anyshape.route.profile.profile import Profile, RouterProfile
from anyshape.route.profile.routers import routers_of

__all__ = ["Profile", "RouterProfile", "routers_of"]
