"use strict";

// validatorUrl: by default Swagger UI asks another host to judge the document.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  validatorUrl: null,
  deepLinking: true,
});
