"""Who exchanges what: two descriptions in, edges out, exact cover checked where it is made."""
