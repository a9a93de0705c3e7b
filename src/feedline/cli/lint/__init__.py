"""`feedline lint`: mistakes in loading code, and code that feedline would simplify."""
