/* iec: language models on machines you own. Made by scripts/c-header.sh from crates/capi/src; do not edit.
 *
 * Every function that can fail returns IEC_OK or another status, which is the exit code that the program would have.
 * iec_last_error() tells why. Results are written through the last parameters, and only if the status says so.
 * Texts come in as pointer and length, in UTF-8. What a function returns is owned by the caller, who frees it with the
 * function that its documentation names. An engine may be used by any number of threads at the same time, except that
 * iec_engine_destroy() must be the last call with it. A callback must not call functions with the engine that calls
 * it: they return IEC_REENTERED. There is no global state. */

#ifndef IEC_H
#define IEC_H

#include <stddef.h>
#include <stdint.h>

// Version of the interface. Functions and fields are only added within a version.
#define IEC_ABI_VERSION 1

// The call succeeded.
#define IEC_OK 0

// A file cannot be read or written, is damaged, or is not supported.
#define IEC_FAILED 1

// An argument or a field of a request is wrong.
#define IEC_USAGE 2

// The model is missing, unreadable or damaged.
#define IEC_MODEL 3

// A quality gate or a comparison refuses the result.
#define IEC_REFUSED 4

// The engine cannot run the model as asked, or has failed.
#define IEC_ENGINE 5

// The system refuses memory or threads.
#define IEC_OUT_OF_MEMORY 6

// A callback called a function with the engine that called it.
#define IEC_REENTERED 7

// The caller cancelled the work.
#define IEC_CANCELLED 130

// A request has the fields of `/v1/completions`.
#define IEC_COMPLETION 0

// A request has the fields of `/v1/chat/completions`.
#define IEC_CHAT 1

// An event has new text.
#define IEC_EVENT_TEXT 0

// An event has new reasoning before an answer.
#define IEC_EVENT_REASONING 1

// A call of a tool begins: `name`, `id`, `index`.
#define IEC_EVENT_TOOL_CALL 2

// More of the arguments of the call `index`: `text`.
#define IEC_EVENT_TOOL_ARGUMENTS 3

// A choice has ended: `finish`.
#define IEC_EVENT_END 4

// The model ended the text, or a stop text appeared.
#define IEC_FINISH_STOP 0

// The text has its largest number of tokens.
#define IEC_FINISH_LENGTH 1

// The model waits for the results of tools.
#define IEC_FINISH_TOOL_CALLS 2

// The caller cancelled the text.
#define IEC_FINISH_CANCELLED 3

// Progress is counted in items.
#define IEC_UNIT_ITEMS 0

// Progress is counted in bytes.
#define IEC_UNIT_BYTES 1

// The vector of a text is the hidden state of its last token.
#define IEC_POOLING_LAST 0

// The vector of a text is the mean of the hidden states of its tokens.
#define IEC_POOLING_MEAN 1

// Handle that cancels requests from other threads.
typedef struct iec_cancel iec_cancel;

// An opened model.
typedef struct iec_engine iec_engine;

// Text of the library, with a zero behind its last byte. Free it with iec_string_free().
typedef struct iec_string {
  // First byte; null for no text.
  char *data;
  // Number of bytes without the zero.
  size_t length;
} iec_string;

// Token ids of the library. Free them with iec_ids_free().
typedef struct iec_ids {
  // First id.
  uint32_t *data;
  // Number of ids.
  size_t length;
} iec_ids;

// Rows of numbers of the library, one behind the other. Free them with iec_matrix_free().
typedef struct iec_matrix {
  // First number.
  float *values;
  // Number of rows.
  size_t rows;
  // Numbers of a row.
  size_t columns;
} iec_matrix;

// Text of the caller, or of an event while its callback runs: UTF-8, not necessarily with a zero at the end. Null with
// length 0 is the empty text.
typedef struct iec_str {
  // First byte.
  const char *data;
  // Number of bytes.
  size_t length;
} iec_str;

// Receiver of progress: a part of the work has `done` of `total` units (IEC_UNIT_BYTES or IEC_UNIT_ITEMS). Several
// threads call it, one after the other. A return value other than 0 cancels the work.
typedef int32_t (*iec_on_progress)(void *user,
                                   struct iec_str label,
                                   uint64_t done,
                                   uint64_t total,
                                   int32_t unit);

// Options of iec_engine_open(). Zero all bytes, then set `struct_size`; zeros are defaults.
typedef struct iec_open_options {
  // sizeof(iec_open_options).
  size_t struct_size;
  // Number of threads; 0 = one per physical core.
  uint32_t threads;
  // Longest prompt with its answer in tokens; 0 = the model's maximum.
  uint32_t context;
  // A JSON object with any option, by the names of the guide (docs/guide/c.md); empty = none.
  struct iec_str json;
} iec_open_options;

// Counters of an engine since it was opened. Set `struct_size` before the call.
typedef struct iec_metrics {
  // sizeof(iec_metrics).
  size_t struct_size;
  // Texts that are computed.
  uint64_t running;
  // Texts that wait.
  uint64_t waiting;
  // Texts that ended.
  uint64_t finished;
  // Tokens of the prompts of all texts that began.
  uint64_t prompt_tokens;
  // Tokens of these prompts that came from the prefix cache.
  uint64_t cached_tokens;
  // Generated tokens.
  uint64_t generated_tokens;
  // Steps of the model.
  uint64_t steps;
  // Time of all steps in seconds.
  double step_seconds;
} iec_metrics;

// A token that is likely at a place.
typedef struct iec_candidate {
  // Id.
  uint32_t id;
  // Natural logarithm of the probability.
  double logprob;
} iec_candidate;

// A token with its probability.
typedef struct iec_token {
  // Id.
  uint32_t id;
  // Natural logarithm of the probability; NaN if the request does not ask for it.
  double logprob;
  // Most likely tokens at its place, most likely first.
  const struct iec_candidate *top;
  // Number of these.
  size_t top_length;
} iec_token;

// Change of an answer. It and its texts are valid while the callback runs.
typedef struct iec_event {
  // Size of the struct in this version of the library.
  size_t struct_size;
  // IEC_EVENT_TEXT and so on.
  int32_t kind;
  // Number of the choice.
  uint32_t choice;
  // New text, or new arguments of a call.
  struct iec_str text;
  // Number of a call in its choice.
  uint32_t index;
  // Why the choice ended: IEC_FINISH_STOP and so on.
  int32_t finish;
  // Id of a call that begins.
  struct iec_str id;
  // Name of the function of a call that begins.
  struct iec_str name;
  // Tokens whose text the event shows.
  const struct iec_token *tokens;
  // Number of these.
  size_t tokens_length;
} iec_event;

// Receiver of events. A return value other than 0 cancels the request.
typedef int32_t (*iec_on_event)(void *user, const struct iec_event *event);

// A request for iec_generate(). Zero all bytes, then set `struct_size`.
typedef struct iec_request {
  // sizeof(iec_request).
  size_t struct_size;
  // IEC_COMPLETION or IEC_CHAT.
  int32_t kind;
  // A JSON object with the fields of the server's API, such as `{"prompt": "Once", "max_tokens": 32}`.
  struct iec_str json;
  // Receiver of events; may be null.
  iec_on_event on_event;
  // First argument of `on_event`.
  void *user;
  // Handle by which another thread may cancel the request; may be null.
  const struct iec_cancel *cancel;
} iec_request;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Frees a text of the library. A null `data` is fine.
void iec_string_free(struct iec_string string);

// Frees token ids of the library. A null `data` is fine.
void iec_ids_free(struct iec_ids ids);

// Frees rows of the library. A null `values` is fine.
void iec_matrix_free(struct iec_matrix matrix);

// Packs a model: `request` is a JSON object with `model`, `out_dir`, and options such as `bits` (docs/guide/c.md).
// `out`, if it is not null, gets the summary as JSON for iec_string_free().
int32_t iec_pack(struct iec_str request,
                 iec_on_progress on_progress,
                 void *user,
                 struct iec_string *out);

// Quantizes a model on trial and writes a manifest for iec_pack(): `request` is a JSON object with `model`, `out`, and
// options such as `bits` or `target_bpw`. `out`, if it is not null, gets the summary as JSON for iec_string_free().
int32_t iec_quantize(struct iec_str request,
                     iec_on_progress on_progress,
                     void *user,
                     struct iec_string *out);

// Describes a pack, a checkpoint, a weight file or a manifest: `request` is a JSON object with `path`, and `tensors`
// or
// `stats`. `out` gets a JSON object for iec_string_free().
int32_t iec_inspect(struct iec_str request,
                    iec_on_progress on_progress,
                    void *user,
                    struct iec_string *out);

// Compares the tensors and files of a pack with their recorded hashes: `request` is a JSON object with `pack`, and
// `key` for its signature. `out` gets a JSON object with `differences` for iec_string_free().
int32_t iec_verify(struct iec_str request,
                   iec_on_progress on_progress,
                   void *user,
                   struct iec_string *out);

// Returns the version of the interface that the library has. It is at least IEC_ABI_VERSION of the header that a
// program was compiled with, unless the library is older.
uint32_t iec_abi_version(void);

// Returns the version of the library, such as "0.1.0"; it lives as long as the process.
const char *iec_version(void);

// Opens a model: a pack, a checkpoint directory, a GGUF file, or ORG/NAME of a downloaded model. `options` may be
// null.
// `out` gets an engine for iec_engine_destroy().
int32_t iec_engine_open(struct iec_str model,
                        const struct iec_open_options *options,
                        struct iec_engine **out);

// Opens the small model that is embedded in the library, for examples and tests. `options` may be null. `out` gets an
// engine for iec_engine_destroy().
int32_t iec_engine_open_embedded(const struct iec_open_options *options,
                                 struct iec_engine **out);

// Cancels all requests of an engine, and frees it. Null is fine. No other call with the engine may run; within a
// callback of the engine it does nothing.
void iec_engine_destroy(struct iec_engine *engine);

// Describes the model as a JSON object: family, context, sizes, whether it has a chat template. Free `out` with
// iec_string_free().
int32_t iec_engine_describe(const struct iec_engine *engine,
                            struct iec_string *out);

// Encodes a text; `special` other than 0 adds the special tokens of the tokenizer. Free `out` with iec_ids_free().
int32_t iec_tokenize(const struct iec_engine *engine,
                     struct iec_str input,
                     int32_t special,
                     struct iec_ids *out);

// Decodes `length` token ids; `skip_special` other than 0 leaves special tokens out. Free `out` with
// iec_string_free().
int32_t iec_detokenize(const struct iec_engine *engine,
                       const uint32_t *ids,
                       size_t length,
                       int32_t skip_special,
                       struct iec_string *out);

// Loads an adapter (LoRA or DoRA of PEFT), which requests may name from then on.
int32_t iec_adapter_load(const struct iec_engine *engine,
                         struct iec_str name,
                         struct iec_str path,
                         float scale);

// Removes an adapter that no request uses.
int32_t iec_adapter_unload(const struct iec_engine *engine, struct iec_str name);

// Returns the names of adapters as a JSON list. Free `out` with iec_string_free().
int32_t iec_adapter_list(const struct iec_engine *engine, struct iec_string *out);

// Returns the counters of an engine. Set `struct_size` of `out` before.
int32_t iec_get_metrics(const struct iec_engine *engine, struct iec_metrics *out);

// Returns all counters of an engine as a JSON object. Free `out` with iec_string_free().
int32_t iec_get_metrics_json(const struct iec_engine *engine, struct iec_string *out);

// Returns all counters and histograms of an engine in the text format of Prometheus. Free `out` with
// iec_string_free().
int32_t iec_get_prometheus(const struct iec_engine *engine, struct iec_string *out);

// Returns the message of the last call of this thread that failed, or an empty text. Free it with iec_string_free().
struct iec_string iec_last_error(void);

// Returns the advice about the last call of this thread that failed, or an empty text. Free it with iec_string_free().
struct iec_string iec_last_help(void);

// Returns the message of the last call of any thread with this engine that failed, or an empty text. Free it with
// iec_string_free().
struct iec_string iec_engine_last_error(const struct iec_engine *engine);

// Answers a request. Its events are passed to `on_event` on this thread, and `out`, if it is not null, gets the whole
// answer as a JSON object for iec_string_free(). A request that was cancelled returns IEC_CANCELLED, and `out` gets
// the answer so far.
int32_t iec_generate(const struct iec_engine *engine,
                     const struct iec_request *request,
                     struct iec_string *out);

// Returns the token ids of the prompt that a request has. Free `out` with iec_ids_free().
int32_t iec_prompt_ids(const struct iec_engine *engine,
                       const struct iec_request *request,
                       struct iec_ids *out);

// Creates a handle that cancels requests from other threads. Free it with iec_cancel_free().
struct iec_cancel *iec_cancel_new(void);

// Cancels all requests that run with the handle, and those that begin with it later. A callback may call it.
void iec_cancel_requests(const struct iec_cancel *cancel);

// Frees a handle that no request uses. Null is fine.
void iec_cancel_free(struct iec_cancel *cancel);

// Computes the logits behind each of `length` tokens: a row per token, a column per token of the vocabulary. Free
// `out` with iec_matrix_free().
int32_t iec_logits(const struct iec_engine *engine,
                   const uint32_t *ids,
                   size_t length,
                   struct iec_matrix *out);

// Computes the output of the final norm for each of `length` tokens: a row per token. Free `out` with
// iec_matrix_free().
int32_t iec_hidden_states(const struct iec_engine *engine,
                          const uint32_t *ids,
                          size_t length,
                          struct iec_matrix *out);

// Computes a vector of length 1 for a text, as a matrix of one row. `pooling` is IEC_POOLING_LAST or IEC_POOLING_MEAN.
// Free `out` with iec_matrix_free().
int32_t iec_embed(const struct iec_engine *engine,
                  struct iec_str input,
                  int32_t pooling,
                  struct iec_matrix *out);

// Computes the log-probability of each of `length` tokens behind those before it. `out` has room for `length` numbers;
// the first becomes NaN.
int32_t iec_score(const struct iec_engine *engine,
                  const uint32_t *ids,
                  size_t length,
                  double *out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* IEC_H */
