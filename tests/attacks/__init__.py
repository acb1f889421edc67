"""Files that lie about themselves, made when the tests run."""
