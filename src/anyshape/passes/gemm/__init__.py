"""Graph passes of matrix products: what stands about a product becomes a part of it."""
