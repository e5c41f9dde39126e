"""Graph passes of routed programs: what stands about products of groups becomes a part of them."""
