class VisionDataset:
    """Base class of Mosaic's image datasets; the contest uses its plain one."""
