"""`oapl view`: a page on this machine that follows runs as they go. It reads run folders and writes to none."""
