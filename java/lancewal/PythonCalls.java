package lancewal;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.lang.reflect.Field;
import java.util.Base64;
import java.util.Map;
import net.razorvine.pickle.Pickler;
import org.apache.spark.api.python.PythonFunction;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceCreationResult;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.execution.datasources.v2.python.UserDefinedPythonDataSource;
import org.apache.spark.sql.execution.python.PythonPlannerRunner;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.Option;

/** Questions that the driver asks lancewal in one of Spark's Python workers, as JSON. */
final class PythonCalls {
  static final String FORMAT = "lancewal";
  static final ObjectMapper JSON = new ObjectMapper();
  private static final int EXCEPTION_THROWN = -2;
  // Spark starts worker modules only if their names begin with "pyspark".
  private static final String WORKER_MODULE = "pyspark_lancewal.calls";

  private PythonCalls() {}

  /** What lancewal says of a table: the data source as Spark pickles it, columns, key, properties. */
  record Description(
      PythonDataSourceCreationResult created, StructType schema, String[] key, Map<String, String> properties) {}

  static Description describe(Map<String, String> options) {
    JsonNode found = ask("describe", options, JSON.createObjectNode());
    StructType schema = (StructType) DataType.fromJson(found.get("schema").asText());
    byte[] pickled = Base64.getDecoder().decode(found.get("source").asText());
    String[] key = JSON.convertValue(found.get("key"), String[].class);
    @SuppressWarnings("unchecked")
    Map<String, String> properties = JSON.convertValue(found.get("properties"), Map.class);
    return new Description(new PythonDataSourceCreationResult(pickled, schema), schema, key, properties);
  }

  /** What Spark was told when it loaded the table; without the key, which only the catalog's tables need. */
  static Description loaded(PythonTable table, CaseInsensitiveStringMap options) {
    PythonDataSourceV2 source;
    try {
      Field field = PythonTable.class.getDeclaredField("ds");
      field.setAccessible(true);
      source = (PythonDataSourceV2) field.get(table);
    } catch (ReflectiveOperationException | RuntimeException error) {
      // Another release of Spark keeps it elsewhere.
      return Refusals.shown(() -> describe(options));
    }
    PythonDataSourceCreationResult created =
        source.getOrCreateDataSourceInPython(FORMAT, options, Option.empty());
    return new Description(created, created.schema(), new String[0], Map.of());
  }

  /** The answer to one question. Throws a {@link RefusedException} for what lancewal refuses. */
  static JsonNode ask(String question, Map<String, String> options, ObjectNode arguments) {
    ObjectNode asked = JSON.createObjectNode();
    asked.put("question", question);
    asked.set("options", JSON.valueToTree(options));
    asked.set("arguments", arguments);
    Call call = new Call(source().dataSourceCls(), asked.toString());
    JsonNode answer = call.runInPython(call.runInPython$default$1());
    if (answer.has("error")) {
      throw new RefusedException(
          question, answer.get("error").asText(), answer.get("message").asText());
    }
    return answer;
  }

  static UserDefinedPythonDataSource source() {
    return SparkSession.active().sessionState().dataSourceManager().lookupDataSource(FORMAT);
  }

  /** A Python data source of its own: Spark keeps what one query asks for in the object. */
  static PythonDataSourceV2 freshSource() {
    PythonDataSourceV2 made = new PythonDataSourceV2();
    made.setShortName(FORMAT);
    return made;
  }

  /** What lancewal refused; {@link Refusals} makes of it what a user gets to see. */
  static final class RefusedException extends RuntimeException {
    final String kind;
    final String question;

    RefusedException(String question, String kind, String message) {
      super(message);
      this.question = question;
      this.kind = kind;
    }
  }

  private static final class Call extends PythonPlannerRunner<JsonNode> {
    private final String question;

    Call(PythonFunction function, String question) {
      super(function);
      this.question = question;
    }

    @Override
    public String workerModule() {
      return WORKER_MODULE;
    }

    @Override
    public void writeToPython(DataOutputStream out, Pickler pickler) {
      try {
        byte[] bytes = question.getBytes(StandardCharsets.UTF_8);
        out.writeInt(bytes.length);
        out.write(bytes);
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    }

    @Override
    public JsonNode receiveFromPython(DataInputStream in) {
      try {
        int length = in.readInt();
        boolean failed = length == EXCEPTION_THROWN;
        byte[] bytes = in.readNBytes(failed ? in.readInt() : length);
        if (failed) {
          // The worker ends without another word: who went on reading would wait forever.
          throw new RefusedException("ask", "PythonException", new String(bytes, StandardCharsets.UTF_8));
        }
        return JSON.readTree(bytes);
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    }
  }
}
