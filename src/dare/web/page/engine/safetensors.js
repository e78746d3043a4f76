export function readSafetensors(buffer) { return new Map(); }
