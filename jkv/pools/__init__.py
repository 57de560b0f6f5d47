"""The pool families, one a module."""
