"""The profile of a dynamic network: what its routers decided, recorded, saved, merged and replayed."""
from anyshape.route.profile.files import load_profile, save_profile
from anyshape.route.profile.overhead import measure_overhead
from anyshape.route.profile.profile import Profile, RouterProfile
from anyshape.route.profile.replay import replay
from anyshape.route.profile.routers import routers_of
from anyshape.route.profile.synthetic import synthetic

__all__ = ["Profile", "RouterProfile", "load_profile", "measure_overhead", "replay", "routers_of",
           "save_profile", "synthetic"]
