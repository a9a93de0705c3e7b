class VisionDataset:
    """What Mosaic's picture datasets derive from; the contest derives from its plain one."""
