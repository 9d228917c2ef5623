"""metadataset"""
