// sweep
