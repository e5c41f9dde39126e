"""What differs while a program is traced: settings, monkey patches, caches of SymInts and fake tensors."""
