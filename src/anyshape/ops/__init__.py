"""The ops, a file per kind; `table` has all of them."""
