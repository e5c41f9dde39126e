"""Dynamo's insides: cache entries, guards, wrappers of AOTAutograd, frames that stay eager."""
