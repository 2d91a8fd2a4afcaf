"""What the front end costs beside the least that a server of tokens can do."""
