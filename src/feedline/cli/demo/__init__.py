"""`feedline demo`: a real model on real pictures, through torch's loader and through feedline's.

`sources` what is cut up, `corpus` the files made of it, `pictures` the dataset, `training` the loop, `comparison` both
loaders over it, `resume` the second act, `show` what a person sees, `command` the whole evening.
"""
