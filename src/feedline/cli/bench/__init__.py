"""`feedline bench`: a sweep of settings over a user's own loader."""
