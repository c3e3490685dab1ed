"""The same model behind other servers, each as its documentation would have it."""
