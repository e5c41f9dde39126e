"""ATen: the table of translations, a file a kind of operator, and decompositions."""
