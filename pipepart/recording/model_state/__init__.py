"""The Python state around a model: kept while it is recorded, read as guards and inputs, watched for what is filled."""
