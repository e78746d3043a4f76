"""Object stores: locations, reading ahead, uploading. No other folder knows a store."""
