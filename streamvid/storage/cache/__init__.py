"""The local disk cache for objects of remote stores."""
