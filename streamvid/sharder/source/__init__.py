"""What the input is: folders, metadata, tars, sealed datasets, object stores."""
