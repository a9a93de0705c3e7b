"""`feedline lint`: mistakes in loading code, and what feedline would simplify."""
